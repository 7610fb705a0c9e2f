"""How a generation's answers are read: what its node said of the model, and what its request allows."""

from __future__ import annotations

from ryzanstein.generation.prompts import MAX_TOOL_CALLS, ChatPrompt, Prompt
from ryzanstein.generation.reply_format import ReplyFormat, ReplyStyle
from ryzanstein.generation.tools import ToolMode
from ryzanstein.replies.families import FAMILIES


def reply_format(prompt: Prompt, style: ReplyStyle) -> ReplyFormat | None:
    """Returns the format; None: the text is content alone.

    A family that only a newer node knows is read as none: its calls are content.
    """
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    callable = () if tools is None or style.calls not in FAMILIES else tools.callable
    if tools is None or not callable:
        return ReplyFormat(thinking=True, opened=style.opened) if style.thinking else None
    return ReplyFormat(
        style.calls,
        style.thinking,
        style.opened,
        tuple(tool.name for tool in callable),
        MAX_TOOL_CALLS if tools.parallel and tools.mode is not ToolMode.NAMED else 1,
        tools.mode is ToolMode.NAMED,
    )

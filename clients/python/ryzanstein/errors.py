"""Domain errors: everything that can go wrong, defined once, in terms that all faces map.

Each error has a code of google.rpc, a reason for machines (`ErrorInfo.reason`) and a message for
people. The interceptor in `ryzanstein.rpc` turns errors into statuses; the HTTP face turns them
into OpenAI error bodies. Nothing here depends on either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

DOMAIN = "ryzanstein.v1"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
ADAPTER_UNFIT = "ADAPTER_UNFIT"
ADAPTER_NOT_SERVED = "ADAPTER_NOT_SERVED"
LOGITS_NOT_FINITE = "LOGITS_NOT_FINITE"
CONSTRAINT_FAILED = "CONSTRAINT_FAILED"
CONSTRAINTS_UNSUPPORTED = "CONSTRAINTS_UNSUPPORTED"
ENGINE_LACKS = "ENGINE_LACKS"
DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
ROUTER_TOO_OLD = "ROUTER_TOO_OLD"
# The cause of a NO_NODES that is returned without waiting.
ALL_DRAIN = "draining"


class Code(IntEnum):
    """The codes of google.rpc.Code, by number."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of a request, and the bound that it violates."""

    field: str
    description: str


@dataclass(eq=False)
class RyzansteinError(Exception):
    """The base of all errors. Subclasses fix the code; instances describe what happened.

    `retry_after_s` is when a client should retry, `violations` lists the invalid fields, and
    `resource` names what is missing.
    """

    message: str
    code: Code = Code.INTERNAL
    reason: str = "INTERNAL"
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    resource: tuple[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def again(self) -> RyzansteinError:
        """Returns an equal error that has been raised nowhere: its frames, and what these keep, are not in it."""
        equal = RyzansteinError.__new__(RyzansteinError)
        equal.__dict__.update(self.__dict__)
        return equal

    def with_fields(self, named: Callable[[str], str]) -> RyzansteinError:
        """Returns the error with other names of the invalid fields, in its message too.

        It is the error itself where `named` changes none.
        """
        names = {each.field: named(each.field) for each in self.violations}
        if all(name == field for field, name in names.items()):
            return self
        message, metadata = self.message, dict(self.metadata)
        for field_name, name in names.items():
            if message.startswith(f"{field_name}:"):
                message = name + message.removeprefix(field_name)
                break
        if (field_name := metadata.get("field", "")) in names:
            metadata["field"] = names[field_name]
        violations = tuple(replace(each, field=names[each.field]) for each in self.violations)
        return replace(self, message=message, metadata=metadata, violations=violations)


def invalid(field_name: str, description: str, value: object = None) -> RyzansteinError:
    """Returns the error for an invalid field of a request. `description` names the bound."""
    visible = "" if value is None else f", got {value!r}"
    return RyzansteinError(
        f"{field_name}: {description}{visible}"[:512],
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        {"field": field_name},
        (FieldViolation(field_name, description),),
    )


def malformed_message(type_name: str) -> RyzansteinError:
    """Returns the error for gRPC data that is not a message of the method's request type."""
    return RyzansteinError(
        f"the request is not a valid {type_name}", Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"type": type_name}
    )


def too_many_records(bound: int, field_name: str) -> RyzansteinError:
    """Returns the error for a message with too many parts. `field_name`: where, if it is known."""
    description = f"must have at most {bound} records (fields, including those of nested messages)"
    return RyzansteinError(
        f"{field_name or 'request'}: {description}",
        Code.INVALID_ARGUMENT,
        "TOO_MANY_RECORDS",
        {"bound": str(bound)},
        (FieldViolation(field_name, description),) if field_name else (),
    )


def context_too_long(prompt_tokens: int, max_tokens: int, context_length: int) -> RyzansteinError:
    """Returns the error for prompt and answer that do not fit; the message has both numbers."""
    return RyzansteinError(
        # The beginning is what clients look for, to shorten the conversation and ask again.
        f"This model's maximum context length is {context_length} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion). "
        "Reduce the length of the prompt or of the completion.",
        Code.INVALID_ARGUMENT,
        CONTEXT_TOO_LONG,
        {
            "prompt_tokens": str(prompt_tokens),
            "max_tokens": str(max_tokens),
            "context_length": str(context_length),
        },
        (FieldViolation("sampling.max_tokens", f"prompt and answer have at most {context_length} tokens"),),
    )


def not_found(kind: str, name: str) -> RyzansteinError:
    """Returns the error for an unknown session, model, generation or node."""
    return RyzansteinError(
        f"no such {kind}: {name[:128]!r}",
        Code.NOT_FOUND,
        f"{kind.upper()}_NOT_FOUND",
        resource=(kind, name[:128]),
    )


def already_exists(kind: str, name: str) -> RyzansteinError:
    return RyzansteinError(
        f"{kind} {name[:128]!r} already exists",
        Code.ALREADY_EXISTS,
        f"{kind.upper()}_EXISTS",
        resource=(kind, name[:128]),
    )


def queue_full(waiting: int, bound: int, retry_after_s: float = 1.0) -> RyzansteinError:
    return _no_room(f"too many requests: {waiting}", bound, {"waiting": waiting, "bound": bound}, retry_after_s)


def prompts_held(num_bytes: int, held: int, bound: int, retry_after_s: float = 2.0) -> RyzansteinError:
    """Returns the refusal of a router that holds as many bytes of prompts as it may."""
    message = f"too many long prompts: {held} bytes are held and this one has {num_bytes}"
    return _no_room(message, bound, {"held_bytes": held, "bound_bytes": bound}, retry_after_s)


def prompts_wait(num_bytes: int, bound: int, retry_after_s: float = 2.0) -> RyzansteinError:
    """Returns the refusal of a node that has as many bytes of prompts as it may that are not tokenized yet."""
    message = f"too many long prompts: {num_bytes} bytes wait to be tokenized"
    return _no_room(message, bound, {"waiting_bytes": num_bytes, "bound_bytes": bound}, retry_after_s)


def _no_room(message: str, bound: int, numbers: Mapping[str, int], retry_after_s: float) -> RyzansteinError:
    metadata = {name: str(number) for name, number in numbers.items()}
    return RyzansteinError(
        f"{message}, the bound is {bound}", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", metadata, retry_after_s=retry_after_s
    )


def out_of_memory(message: str, retry_after_s: float = 1.0) -> RyzansteinError:
    """Returns the error of a node that lacks memory even for this request alone."""
    return RyzansteinError(message, Code.RESOURCE_EXHAUSTED, OUT_OF_MEMORY, retry_after_s=retry_after_s)


def logits_not_finite(message: str) -> RyzansteinError:
    """Returns the error for logits of this request that are not finite, on healthy ranks."""
    return RyzansteinError(message, Code.INTERNAL, LOGITS_NOT_FINITE)


def constraint_failed(message: str) -> RyzansteinError:
    """Returns the error for a constraint that can no longer be followed in the middle of an answer."""
    return RyzansteinError(message, Code.FAILED_PRECONDITION, CONSTRAINT_FAILED)


def constraints_unsupported(model: str) -> RyzansteinError:
    """Returns the error for a constraint when no node of the model enforces any."""
    return RyzansteinError(
        f"no node that serves {model!r} enforces constraints on answers",
        Code.FAILED_PRECONDITION,
        CONSTRAINTS_UNSUPPORTED,
        {"model": model, "field": "sampling.constraint"},
        (FieldViolation("sampling.constraint", "is not enforced by any node that serves the model"),),
    )


def engine_lacks(model: str, field_name: str, engine: str = "") -> RyzansteinError:
    """Returns the error for a request that uses what the model's engines cannot do: a field, or "embeddings".

    `field_name` is as clients write it. `engine`: the name and version of one of the engines, where it has one.
    """
    named = f" ({engine})" if engine else ""
    return RyzansteinError(
        f"{field_name}: not supported by the engine of model {model[:128]!r}{named}",
        Code.FAILED_PRECONDITION,
        ENGINE_LACKS,
        {"model": model[:128], "field": field_name} | ({"engine": engine} if engine else {}),
        (FieldViolation(field_name, "is not supported by the engine of the model"),),
    )


def too_busy(expected_wait_s: float, objective_s: float, retry_after_s: float) -> RyzansteinError:
    """Returns the error for a first token that would come after the latency objective."""
    return RyzansteinError(
        f"the first token would take {expected_wait_s:.2f} s, the objective is {objective_s:g} s",
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        {"expected_wait_s": f"{expected_wait_s:.3f}", "objective_s": f"{objective_s:g}"},
        retry_after_s=retry_after_s,
    )


def deadline_unreachable(expected_s: float, left_s: float, retry_after_s: float) -> RyzansteinError:
    """Returns the error for a request whose answer cannot come before the client's deadline.

    The request is refused before any work.
    """
    return RyzansteinError(
        f"the answer would take {expected_s:.2f} s, the deadline is in {left_s:.2f} s",
        Code.DEADLINE_EXCEEDED,
        DEADLINE_UNREACHABLE,
        {"expected_s": f"{expected_s:.3f}", "left_s": f"{left_s:.3f}"},
        retry_after_s=retry_after_s,
    )


def draining(node_id: str) -> RyzansteinError:
    return RyzansteinError(f"node {node_id} is draining", Code.UNAVAILABLE, "DRAINING", {"node_id": node_id}, retry_after_s=1.0)


def no_nodes(model: str, why: str, cause: str = "") -> RyzansteinError:
    """Returns the error for a model without a ready node.

    `cause` is how the last attempt of a started generation ended, or ALL_DRAIN.
    """
    return RyzansteinError(
        f"no ready node serves {model!r}: {why}",
        Code.UNAVAILABLE,
        "NO_NODES",
        {"model": model, "cause": cause} if cause else {"model": model},
        retry_after_s=1.0,
    )


def all_drain(model: str, node_ids: Sequence[str]) -> RyzansteinError:
    """Returns the error for a model whose nodes all drain because an operator requested it."""
    return no_nodes(model, f"all its nodes are draining ({', '.join(node_ids)[:256]})", ALL_DRAIN)


def nodes_too_old(model: str, features: Collection[str]) -> RyzansteinError:
    """Returns the error for a request of which every node of the model would ignore a part."""
    named = ", ".join(sorted(features))
    return RyzansteinError(
        f"no node that serves {model!r} knows what the request needs ({named}): they are of an older version",
        Code.UNIMPLEMENTED,
        "NODES_TOO_OLD",
        {"model": model, "features": named},
    )


def adapter_removed(name: str, model: str) -> RyzansteinError:
    """Returns the error for a request whose adapter no node has any more. The model alone must not answer instead."""
    return RyzansteinError(
        f"adapter {name!r} of {model!r} was removed, or replaced by another one of this name",
        Code.NOT_FOUND,
        "ADAPTER_REMOVED",
        {"adapter": name, "model": model},
        resource=("model", name),
    )


def adapter_unfit(name: str, field_name: str, why: str) -> RyzansteinError:
    """Returns the error for an adapter that does not fit its model.

    `field_name`: a tensor, or a field of its configuration.
    """
    return RyzansteinError(
        f"adapter {name!r}: {field_name}: {why}",
        Code.INVALID_ARGUMENT,
        ADAPTER_UNFIT,
        {"adapter": name, "field": field_name},
        (FieldViolation(field_name, why),),
    )


def adapter_no_room(name: str, num_bytes: int, bound: int, most: int) -> RyzansteinError:
    """Returns the error for an adapter that the memory for adapters has no room for, beside the pinned ones."""
    return RyzansteinError(
        f"adapter {name!r} needs {num_bytes} bytes, which pinned adapters, if any, do not leave: "
        f"the bounds are {bound} bytes (adapter_bytes) and {most} adapters",
        Code.RESOURCE_EXHAUSTED,
        "ADAPTER_NO_ROOM",
        {"adapter": name, "bytes": str(num_bytes), "bound_bytes": str(bound), "bound": str(most)},
        retry_after_s=1.0,
    )


def attempts_exhausted(attempts: int, cause: str, reason: str = "") -> RyzansteinError:
    """Returns the error after `attempts` attempts in a row that failed without a new token.

    The request may be why the nodes failed, so the error does not suggest a retry. `reason` is the
    reason of the last node's own error, if it reported one.
    """
    return RyzansteinError(
        f"{attempts} attempts in a row failed without a new token, last cause: {reason or cause}",
        Code.INTERNAL,
        "ATTEMPTS_EXHAUSTED",
        {"attempts": str(attempts), "cause": cause, **({"reason": reason} if reason else {})},
    )


def deadline_exceeded(message: str = "the deadline passed") -> RyzansteinError:
    return RyzansteinError(message, Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


def cancelled(message: str = "cancelled by the client") -> RyzansteinError:
    return RyzansteinError(message, Code.CANCELLED, "CANCELLED")


def failed_precondition(reason: str, message: str) -> RyzansteinError:
    return RyzansteinError(message, Code.FAILED_PRECONDITION, reason)


def unavailable(reason: str, message: str, retry_after_s: float = 1.0) -> RyzansteinError:
    return RyzansteinError(message, Code.UNAVAILABLE, reason, retry_after_s=retry_after_s)


def internal(message: str) -> RyzansteinError:
    """Returns the error for a bug of ours. The message must not contain secrets or a stack."""
    return RyzansteinError(message, Code.INTERNAL, "INTERNAL")


def about_field(error: RyzansteinError, field: str) -> RyzansteinError:
    """Returns the same error about another field, for what was made of that one: a grammar of a schema, for example."""
    metadata = {**error.metadata, "field": field}
    violations = tuple(FieldViolation(field, each.description) for each in error.violations)
    return replace(error, metadata=metadata, violations=violations)

"""Programs that run what others wrote, in processes of their own that can be killed.

`starting` is the agent's side, `inside` what such a program does first. What they say to each other is
their own.
"""

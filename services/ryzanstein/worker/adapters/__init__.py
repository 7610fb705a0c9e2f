"""Low-rank adapters (Hu et al. 2021, "LoRA") as peft writes them: read, checked whole, and packed for the ranks.

Nothing here imports torch or peft: the agent checks an adapter in a thread, before a rank hears of it.
"""

"""The versions of a model, and what runs on them: generations, vectors, profiles."""

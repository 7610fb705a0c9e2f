"""How a rank runs its model: values without behavior."""

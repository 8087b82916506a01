"""State of the training process, on torch: naming, arena, snapshot, restore."""

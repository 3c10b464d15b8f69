"""What each well-known fault of batches costs, measured: `make prices`."""

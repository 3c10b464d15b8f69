"""What only a notebook needs: figures, widgets, predictions, exercises, and the refresh of stored outputs."""

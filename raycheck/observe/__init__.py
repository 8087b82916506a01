"""What happened in a run: events and reports."""

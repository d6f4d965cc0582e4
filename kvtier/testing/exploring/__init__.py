"""The explorer: the whole engine on a manual clock, under random schedules, faults and crashes (docs/testing.md)."""

"""WHERE blocks lie: memory and disk, each behind the same few batch verbs."""

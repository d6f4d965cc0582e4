"""What the verbs that mend and move stores share; each verb itself is `kvtier.cli.cmd_<verb>`, see docs/store.md."""

"""The `zeroshard` command: one module per subcommand."""

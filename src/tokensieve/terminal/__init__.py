"""What a command is connected to: standard streams, and progress bars on a terminal."""

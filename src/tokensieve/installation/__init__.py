"""What is installed, and what to install for the rest: `tokensieve` itself needs little beside torch."""

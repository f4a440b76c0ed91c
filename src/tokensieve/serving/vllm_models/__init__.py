"""vLLM's models with a plan: one file per family, beside what they share. Only vLLM imports them, by name."""

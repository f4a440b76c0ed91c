"""What is measured: one file a task, each with evaluate(encoders, batches, ...) -> metrics of every encoder."""

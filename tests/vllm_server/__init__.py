"""`make test-vllm`: the plug-in against a real vLLM server, in a virtual environment of its own."""

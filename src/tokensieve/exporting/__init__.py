"""`tokensieve export`: an image tower with its plan inside, as one file for ONNX Runtime or torch.export."""

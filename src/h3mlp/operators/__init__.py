"""What a caller calls: the public functions and their torch.library forms."""

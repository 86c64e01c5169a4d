"""What the ``h3mlp`` command shows."""

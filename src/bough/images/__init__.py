"""Images as users send them: opened, checked, resized. Pillow and numpy; no tensors."""

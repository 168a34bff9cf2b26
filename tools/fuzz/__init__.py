"""What looks for inputs that end in a traceback, take too long or too much memory, or are taken though nonsense."""

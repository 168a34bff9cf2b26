"""What everybody in a federation knows: the task, and how clients train."""

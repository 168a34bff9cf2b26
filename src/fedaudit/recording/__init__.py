"""What a federation that isn't ours did, recorded: a client's training watched, and repeated to check the record."""

"""The commands `fedaudit study` and `fedaudit bench`."""

"""What travelled in a federation, who sees what of it, and the truth apart; on disk, too."""

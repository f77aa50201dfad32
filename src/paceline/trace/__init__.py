"""What happened, round by round."""

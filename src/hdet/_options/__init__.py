"""What can be asked of a run, in small objects that check themselves. They import nothing of what they ask for."""

"""Programs that contenders run in processes of their own, and how they are started and answer."""

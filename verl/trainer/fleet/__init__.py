"""The processes of a run, whatever it trains: where they are, how they start, and who takes the place of the lost."""

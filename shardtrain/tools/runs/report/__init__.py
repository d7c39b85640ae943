"""The verb ``report``: what runs did, from the files that they leave, as one page that needs nothing else."""

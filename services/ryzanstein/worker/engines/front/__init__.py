"""What an engine of others lacks, before it: the queue, fairness, deadlines, refusals. Plain Python."""

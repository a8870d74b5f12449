"""`skinny replay`: measure a plan's cells again on this machine and say which verdicts hold."""

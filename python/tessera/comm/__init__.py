"""The processes of a job: the connection, what is agreed over it, and what travels."""

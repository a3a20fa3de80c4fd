"""The processes of a job: how they find each other, exchange values, and notice that one is lost or stuck."""

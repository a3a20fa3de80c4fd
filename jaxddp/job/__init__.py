"""The processes of a job: discovery, the exchange of values, and the detection of lost or stuck processes."""

"""Load for any server of the OpenAI API: what is asked when, the clients that ask, what they saw (`kvmesh load`)."""

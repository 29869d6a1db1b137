"""Load for any server of the OpenAI API: schedule, clients, measurements (`kvmesh load`)."""

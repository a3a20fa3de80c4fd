"""How a process shows that it knows the key of a job, without saying it: HMAC-SHA256 of what the other one made up.

Without a key the proofs are empty, and whoever reaches the coordinator's address may join.
"""

import hashlib
import hmac
import secrets

from jaxddp.job.environment import Job
from jaxddp.job.messages import Challenge, Hello


def nonce() -> str:
    """A text that nobody has seen before."""
    return secrets.token_hex(16)


def proof_of_process(job: Job, challenge: Challenge, own: str) -> str:
    """What a process says in its `Hello`, to the challenge of process 0 and with a nonce of its own."""
    return _proof(job.key, "process", challenge.nonce, own, job.process_id, job.num_processes, job.run_id)


def expected_proof(key: str, challenge: Challenge, hello: Hello) -> str:
    """What a process that knows the key has said."""
    return _proof(key, "process", challenge.nonce, hello.nonce, hello.process, hello.count, hello.run_id)


def proof_of_coordinator(key: str, hello_nonce: str, jax_address: str) -> str:
    """What process 0 says in its `Welcome`."""
    return _proof(key, "coordinator", hello_nonce, jax_address)


def same(one: str, other: str) -> bool:
    """Whether two proofs are the same, in a time that tells nothing about either."""
    return hmac.compare_digest(one.encode(), other.encode())


def _proof(key: str, *parts: str | int) -> str:
    if not key:
        return ""
    # The repr separates the parts without a doubt.
    return hmac.new(key.encode(), repr(parts).encode(), hashlib.sha256).hexdigest()

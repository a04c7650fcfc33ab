"""The exceptions of agent loops.

AgentLoopError           one sample failed; names it and its loop; the cause is what went wrong
├── AgentCodeError       in code of the user's own: the loop, or an interaction
│   └── AgentSetupError  no sample could be run like that; the run ends whatever `on_failure` says
├── PromptTooLong        a prompt has more tokens than data.max_prompt_length and data.truncation=error
└── AgentLoopTimeout     workers did not finish a batch in time; names them

Each has one message, so that it survives Ray's pickling. A rollout server that dies or does not answer is a
`verl.workers.rollout.errors.RolloutError`.
"""

from __future__ import annotations

from verl.utils.user_code import UserCodeError


class AgentLoopError(Exception):
    pass


class AgentCodeError(AgentLoopError, UserCodeError):
    pass


class AgentSetupError(AgentCodeError):
    pass


class PromptTooLong(AgentLoopError):
    pass


class AgentLoopTimeout(AgentLoopError):
    pass

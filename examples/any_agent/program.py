"""A program that knows nothing of training: the OpenAI client finds the policy in its environment."""

import json
import sys

from openai import OpenAI

sample = json.load(sys.stdin)
answer = OpenAI().chat.completions.create(model="policy", messages=sample["messages"])
print(answer.choices[0].message.content)

"""A testing tool: an engine that computes nothing and answers from a file (`--engine scripted --script FILE`).

The file is JSON: `{"rules": [{…}, …]}`. The first rule that fits a turn answers it. Fields of a rule, all optional:

    match, absent          text, or a list of texts, that the decoded prompt must hold, or must not hold; the decoded
                           prompt has special tokens spelled out, so "<tool_result>" finds the follow-up of a tool call
    turn                   fits only the turn of this number (from 0, in the order of admission)
    times                  fits only so many turns
    reasoning              text that comes first, with `</think>` after it, where the prompt opens in reasoning
    reply                  text in the model's own markup; special tokens that are spelled out become those tokens
    ids                    token ids to send instead of reasoning and reply
    finish                 "stop" (default), or "length" with the last tokens; max_tokens ends every reply
    tokens_per_step        tokens a decode step (default 1)
    prefill_s_per_token    time that a step takes for each position it prefills
    step_s                 time that a step takes that decodes this turn
    fail_at_step           the turn's step of this number (from 0, prefill included) raises
    hang_at_step, hang_s   the turn's step of this number takes `hang_s` (default: an hour)

Its pages hold the ids of their positions; a prompt is compared with them before it is answered, so wrong pages show.

A constraint changes nothing: a reply is what the file says. Log-probabilities are made up, every token being certain.

Imports `types` and `errors`. The tokenizer comes in as two functions.
"""

from dsuf.engine_scripted.engine import ScriptedEngine
from dsuf.engine_scripted.script import NO_RULE, Rule, Script, load_script

__all__ = ["NO_RULE", "Rule", "Script", "ScriptedEngine", "load_script"]

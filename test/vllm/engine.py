"""One real vLLM engine in one process, told what to do by JSON lines on stdin; answers are JSON lines on descriptor 3.

Commands: {"do": "start", ...}, {"do": "generate", ...}, {"do": "settle"}, {"do": "reset"}, {"do": "state"}, {"do": "stop"}.
Source: the trial of connectors in vLLM main 7cfb97e (2026-08-20) that docs/vllm.md tells of.
"""
import json
import os
import signal
import sys
import time
import traceback

answers = os.fdopen(3, "w", buffering=1)


def answer(**fields):
    answers.write(json.dumps(fields) + "\n")


class Engine:
    def __init__(self):
        self.llm = None
        self.serial = 0

    def start(self, model, options, transfer, async_scheduling=False):
        began = time.time()
        if async_scheduling:  # the CPU platform turns it off; on GPUs it is the default, so a connector must bear it
            from vllm.platforms.cpu import CpuPlatform
            real = CpuPlatform.check_and_update_config.__func__

            def keep(cls, config):
                real(cls, config)
                config.scheduler_config.async_scheduling = True

            CpuPlatform.check_and_update_config = classmethod(keep)
        from vllm import LLM
        from vllm.config import KVTransferConfig
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(model=model, disable_log_stats=False, enforce_eager=True, skip_tokenizer_init=True, **options)
        config = self.llm.llm_engine.vllm_config
        return {"seconds": time.time() - began, "blocks": config.cache_config.num_gpu_blocks,
                "async_scheduling": bool(config.scheduler_config.async_scheduling)}

    def metrics(self):
        found = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                name = "_".join(filter(None, (metric.name, metric.labels.get("reason"))))
                found[name] = found.get(name, 0) + value
        known = {short: found.get("vllm:" + name, 0) for short, name in (
            ("external_queries", "external_prefix_cache_queries"), ("external_hits", "external_prefix_cache_hits"),
            ("local_hits", "prefix_cache_hits"), ("preemptions", "num_preemptions"))}
        # What the connector says of itself, for whoever asks why so little was loaded.
        return {**known, **{name.removeprefix("vllm:"): value for name, value in found.items() if "kvtier" in name}}

    def generate(self, prompts, tokens=12, events=(), salts=None, prompt_logprobs=None, limit_s=240, abort=(), waves=1, logprobs=None):
        """Runs all prompts together. events: [{"after_finished" | "after_steps": n, "signal": 9, "pid": p}].
        abort: [{"index": i, "after_steps": n}]."""
        from vllm import SamplingParams
        engine = self.llm.llm_engine
        before = self.metrics()
        names, at = {}, {}
        began, cpu = time.time(), time.process_time()
        self.serial += 1
        results = [None] * len(prompts)
        first = [None] * len(prompts)

        def add(index):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                                    prompt_logprobs=prompt_logprobs, logprobs=logprobs)
            name = f"{self.serial}-{index}"
            prompt = {"prompt_token_ids": prompts[index]}
            if salts and salts[index]:
                prompt["cache_salt"] = salts[index]
            engine.add_request(name, prompt, params)
            names[name] = index
            at[name] = time.time()

        per_wave = (len(prompts) + waves - 1) // waves
        queue = [list(range(i, min(i + per_wave, len(prompts)))) for i in range(0, len(prompts), per_wave)]
        steps = done = 0
        events, abort = list(events), list(abort)
        aborted = set()
        for index in queue.pop(0):
            add(index)
        while engine.has_unfinished_requests() or queue:
            if not engine.has_unfinished_requests():
                for index in queue.pop(0):
                    add(index)
            if time.time() - began > limit_s:
                raise TimeoutError(f"{done} of {len(prompts)} after {limit_s} s: unfinished requests")
            for event in list(events):
                if steps >= event.get("after_steps", 0) and done >= event.get("after_finished", 0):
                    os.kill(event["pid"], event["signal"])
                    events.remove(event)
            for item in list(abort):
                if steps >= item["after_steps"]:
                    if results[item["index"]] is None:
                        engine.abort_request([f"{self.serial}-{item['index']}"])
                        aborted.add(item["index"])
                    abort.remove(item)
            outputs = engine.step()
            steps += 1
            for output in outputs:
                index = names[output.request_id]
                if first[index] is None and output.outputs and output.outputs[0].token_ids:
                    first[index] = time.time() - at[output.request_id]
                if output.finished and results[index] is None:
                    done += 1
                    one = output.outputs[0]
                    results[index] = {"tokens": list(one.token_ids), "reason": one.finish_reason, "cached": output.num_cached_tokens}
                    if prompt_logprobs is not None:
                        results[index]["prompt_logprobs"] = [one and one[token].logprob if token in (one or ()) else None for one, token in
                                                             zip(output.prompt_logprobs or (), prompts[index])]
                    if logprobs is not None:
                        results[index]["logprobs"] = [max(v.logprob for v in position.values()) for position in one.logprobs]
            if not outputs:
                time.sleep(0.001)
        after = self.metrics()
        return {"seconds": time.time() - began, "cpu_s": time.process_time() - cpu, "steps": steps, "results": results, "first_s": first, "aborted": sorted(aborted),
                **{name: after[name] - before.get(name, 0) for name in after}}

    def settle(self, seconds=2.0):
        """Lets asynchronous stores end: steps go on (a short request of tokens that no test uses), then silence."""
        end = time.time() + seconds
        while time.time() < end:
            self.generate([[7, 7, 7]], tokens=2)
            time.sleep(0.2)
        return {}

    def mutate(self, factor=-1.5):
        """Other weights in the running engine, as after an online update."""
        model = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        import torch
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "layers.0" in name and "o_proj" in name:
                    value.mul_(factor)
                    return {"mutated": name}
        raise RuntimeError("no such weights")

    def reset(self, connector=False):
        for _ in range(100):
            if self.llm.reset_prefix_cache(reset_connector=connector):
                return {"reset": True}
            self.generate([[7, 7, 7]], tokens=2)
            time.sleep(0.05)
        return {"reset": False}

    def state(self):
        core = getattr(getattr(self.llm.llm_engine, "engine_core", None), "engine_core", None)
        if core is None:
            return {"free_blocks": None}
        scheduler = core.scheduler
        return {"free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), "requests": len(scheduler.requests),
                "groups": len(scheduler.kv_cache_config.kv_cache_groups)}

    def stop(self):
        engine = self.llm.llm_engine
        try:
            engine.engine_core.shutdown()
        finally:
            self.llm = None
        return {}


def main():
    engine = Engine()
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            answer(ok=True, **(getattr(engine, do)(**command) or {}))
        except BaseException as error:  # the parent must hear of everything
            answer(ok=False, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-4000:])
            if not isinstance(error, Exception):
                raise
        if do == "stop":
            break


if __name__ == "__main__":
    main()

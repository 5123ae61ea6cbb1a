"""A server with the interface of vLLM that grpo.py uses: python vllm_stand_in.py PORT MODEL [DIES_AFTER].

It answers one request at a time, by the model in fp32. After so many answers it ends, in the middle of a request.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from shared.models.generation import generate

PORT, MODEL, DIES_AFTER = int(sys.argv[1]), sys.argv[2], int([*sys.argv, "0"][3])
lock = threading.Lock()
models = {MODEL: AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)}
counts = {"answers": 0}


class Handler(BaseHTTPRequestHandler):
    def reply(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        data = [{"id": name, "parent": None if name == MODEL else MODEL} for name in models]
        self.reply({"data": data}) if self.path == "/v1/models" else self.reply({}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            self.act(asked)

    def act(self, asked: dict) -> None:
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            return self.reply({"error": {"message": "unauthorised"}}, 401)
        if self.path == "/v1/load_lora_adapter":
            name = asked["lora_name"]
            if name in models:
                return self.reply({"error": {"message": "has already been loaded"}}, 400)
            base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
            models[name] = PeftModel.from_pretrained(base, asked["lora_path"]).eval()
            return self.reply({})
        if self.path == "/v1/unload_lora_adapter":
            known = models.pop(asked["lora_name"], None)
            return self.reply({}, 200 if known else 404)
        if self.path == "/collective_rpc" and asked["method"] == "reload_weights":
            models[MODEL] = AutoModelForCausalLM.from_pretrained(asked["kwargs"]["weights_path"], dtype=torch.float32)
            return self.reply({"results": [None]})
        if self.path == "/reset_prefix_cache":
            return self.reply({})
        if self.path != "/v1/completions" or asked["model"] not in models:
            return self.reply({"error": {"message": f"{asked.get('model')} does not exist"}}, 404)
        assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["repetition_penalty"]) == (1, 1, -1, 1)
        counts["answers"] += 1
        if counts["answers"] == DIES_AFTER:
            os._exit(1)
        model, prompt = models[asked["model"]], asked["prompt"]
        draws = np.random.default_rng(asked["seed"]).random((1, asked["max_tokens"]))
        ends = asked["stop_token_ids"]
        (ids,) = generate(model, [prompt], max_new_tokens=asked["max_tokens"], ends=ends, draws=draws)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        values = logits[range(len(ids)), ids].tolist()
        self.reply({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": values}, "finish_reason": "stop"}]})

    def log_message(self, *args: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()

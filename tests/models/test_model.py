"""What needs to know a model's blocks, and documents that are packed but cannot see each other."""

import copy
from collections import Counter
from contextlib import nullcontext
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shared.models.adapters import refuse_tied_embeddings, trained_in_fp32
from shared.models.blocks import compile_blocks, compile_images, in_eval_mode, repeated_blocks, set_gradient_checkpointing
from shared.models.card import model_card
from shared.models.checks import require_fit
from shared.models.counts import flops_per_token, measure
from shared.models.generation import continuations, end_generation_at, ends_of, generate
from shared.models.hub import from_architecture, from_hub, identity_of_frozen, override
from shared.models.loading import class_of, load_causal_lm
from shared.models.loss import causal_lm_loss
from shared.process.errors import ConfigError
from tests.small_models import VOCAB, architectures, llama, make, on_meta, tokens, words


def gradients(setting, *, dropout=0.0):
    """(gradients by name, forwards of each block's MLP) of one step with 5 blocks."""
    torch.manual_seed(0)
    subject = llama(num_hidden_layers=5, attention_dropout=dropout).train()
    set_gradient_checkpointing(subject, setting)
    forwards = Counter()
    for i, block in enumerate(repeated_blocks(subject)):
        block.mlp.register_forward_pre_hook(lambda *_, i=i: forwards.update([i]))
    torch.manual_seed(1)
    ids = tokens(2, 12)
    causal_lm_loss(subject, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).backward()
    return {name: p.grad for name, p in subject.named_parameters()}, [forwards[i] for i in range(5)]


@pytest.mark.parametrize(
    ("setting", "recomputed"),
    [("full", [0, 1, 2, 3, 4]), ("2", [1, 3]), ("5", [4]), ("offload", [0, 1, 2, 3, 4])],
)
def test_recomputing_blocks_changes_no_gradient(setting, recomputed):
    expected, _ = gradients("none", dropout=0.3)
    found, forwards = gradients(setting, dropout=0.3)
    assert forwards == [2 if i in recomputed else 1 for i in range(5)]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_an_evaluation_leaves_the_weights_as_they_are(tmp_path):
    """RWKV halves weights of every sixth block for inference, in place."""
    config = transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=7, context_length=32)
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    subject = load_causal_lm(str(tmp_path), attn_implementation="auto").train()
    before = {name: parameter.clone() for name, parameter in subject.named_parameters()}
    with in_eval_mode(subject), torch.no_grad():
        subject(tokens(1, 5))
    assert all(torch.equal(before[name], parameter) for name, parameter in subject.named_parameters())


def test_blocks_are_the_largest_list_of_one_class_and_refused_where_they_cannot_be_recomputed():
    subject = nn.Module()
    subject.small = nn.ModuleList([nn.Linear(1, 1) for _ in range(9)])
    subject.mixed = nn.ModuleList([nn.Linear(50, 50), nn.LayerNorm(50)])
    subject.large = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
    assert repeated_blocks(subject) == list(subject.large)
    with pytest.raises(ConfigError, match="Linear has no list of equal blocks"):
        repeated_blocks(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="does not support --gradient_checkpointing"):
        set_gradient_checkpointing(subject, "full")
    set_gradient_checkpointing(subject, "none")


@pytest.fixture
def graphs(monkeypatch):
    """What compiled blocks are compiled to, traced only."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=counter))
    yield counter.graphs
    torch.compiler.reset()


def test_evaluations_and_texts_leave_the_compiled_training_step_its_constant_sizes(graphs):
    subject = make("llama")
    compile_blocks(subject)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for rows, length in ((3, 7), (2, 9)):
            causal_lm_loss(subject, {"input_ids": tokens(rows, length), "labels": tokens(rows, length)})
    continuations(subject, Spells(), [[1, 4], [20]], max_new_tokens=4)
    assert not graphs
    for _ in range(2):
        causal_lm_loss(subject, {"input_ids": tokens(4, 16), "labels": tokens(4, 16)}).backward()
    (graph,) = graphs
    examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    assert all(isinstance(size, int) for example in examples for size in getattr(example, "shape", [None]))


@pytest.mark.parametrize(
    ("architecture", "compiled"),
    [
        (transformers.ViTConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48), [1]),
        (transformers.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[1, 2], window_size=4), [2]),  # of two widths
        (transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]), [0]),
    ],
)
def test_image_models_of_equal_blocks_are_compiled_by_blocks_and_others_whole(graphs, architecture, compiled):
    architecture.image_size = 64
    subject = transformers.AutoModelForImageClassification.from_config(architecture)
    compile_images(subject)
    subject(pixel_values=torch.zeros(2, 3, 64, 64)).logits.sum().backward()
    attention = [[n for n in graph.graph.nodes if n.target is F.scaled_dot_product_attention] for graph in graphs]
    assert [len(nodes) for nodes in attention] == compiled  # of three blocks of a ViT one graph
    if isinstance(architecture, transformers.ViTConfig):
        assert attention[0][0].kwargs["attn_mask"] is None  # transformers 5.17 makes one where it is compiled whole


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@torch.no_grad()
def test_the_loss_is_that_of_transformers_times_its_targets(name):
    subject = make(name)
    ids = tokens(3, 12)
    labels = ids.masked_fill(tokens(3, 12, seed=1) < 20, -100)
    labels[:, 0] = -100
    theirs = subject(input_ids=ids, labels=labels, use_cache=False).loss
    ours = causal_lm_loss(subject, {"input_ids": ids[:, :-1], "labels": labels[:, 1:]})
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs * (labels != -100).sum(), atol=1e-4, rtol=1e-5)


# FLOPs ---------------------------------------------------------------------------------------------------------------

# By hand: query and output 32 x 32, key and value 32 x 16, three of 32 x 48; two blocks; head 32 x 64.
BLOCKS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
HEAD = 32 * VOCAB
NORMS = 5 * 32  # may be counted or left out
ATTENTION = 12 * 2 * 32 * 100


def test_flops_of_frozen_weights_leave_out_their_own_gradient():
    frozen = llama()
    frozen.requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    by_hand = 4 * BLOCKS + 6 * HEAD + ATTENTION
    assert by_hand <= flops_per_token(frozen, 100) <= by_hand + 4 * NORMS


@pytest.mark.parametrize("name", architectures())
def test_flops_are_those_that_torch_counts(name):
    """Within 1 %, and 5 % with a recurrence, which is left out. torch counts depthwise convolutions as dense."""
    config = architectures()[name]
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    subject = from_architecture(class_of(config), config, **options).eval()
    with FlopCounterMode(display=False) as counter:
        subject(input_ids=tokens(1, 64), use_cache=False).logits.sum().backward()
    counted = sum(n for kind, n in counter.get_flop_counts()["Global"].items() if "convolution" not in str(kind)) / 64
    recurrent = name in ("qwen3_next", "nemotron_h", "jamba", "mamba")
    assert flops_per_token(subject, 64) == pytest.approx(counted, rel=0.05 if recurrent else 0.01)


def test_flops_of_attention_follow_the_width_of_its_heads_and_end_with_its_window():
    """Of Gemma's 12 layers every sixth sees all tokens, the others 64."""
    for subject, heads, size in ((llama(head_dim=24), 2, 24), (on_meta(architectures()["gemma3_text"]), 4, 32)):
        assert flops_per_token(subject, 300) - flops_per_token(subject, 200) == 12 * 2 * heads * size * 100


def test_flops_of_adapters_on_experts_are_those_of_the_ones_that_a_token_is_sent_to():
    subject = on_meta(architectures()["deepseek_v3"])
    whole = flops_per_token(subject.requires_grad_(False), 64)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(subject, LoraConfig(r=4, target_modules=["o_proj"], target_parameters=experts))
    # 6 times (128 x 128 of o_proj), 4 times (128 x (2 x 64) and 64 x 128) of 2 experts.
    assert flops_per_token(adapted, 64) - whole == 6 * 4 * (6 * (128 + 128) + 4 * 2 * (128 + 128 + 64 + 128))
    subject.config.num_experts_per_tok = 0
    assert flops_per_token(subject, 100) is None


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_keep_no_copy_of_their_input_in_fp32_and_learn_the_same(dora):
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", use_dora=dora)
    adapted = get_peft_model(llama().to(torch.bfloat16), lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)

    def learn():
        kept = []
        ids = tokens(2, 64)
        keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)
        with keep, torch.autocast("cpu", torch.bfloat16):
            loss = causal_lm_loss(adapted, {"input_ids": ids, "labels": ids})
        trained = [p for p in adapted.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(storages.values()), loss, *torch.autograd.grad(loss, trained)

    found = [learn()]
    trained_in_fp32(adapted)
    found.append(learn())
    (before, *expected), (after, *same) = found
    assert after == before if dora else after < 0.9 * before, (before, after)
    torch.testing.assert_close(same, expected, rtol=0, atol=0)


class Scored(nn.Module):
    """Modules one after the other, as a model that returns logits, with dropout and a parameter that is not used."""

    def __init__(self, *modules):
        super().__init__()
        self.layers = nn.Sequential(*modules, nn.Dropout(0.5))
        self.mask_token = nn.Parameter(torch.ones(3))

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.layers(pixel_values))


def test_measuring_counts_forward_and_both_backward_products_of_a_matrix():
    # 2 multiply-adds each: forward, gradient of the weight; the input needs none.
    images = {"pixel_values": torch.zeros(3, 5)}
    assert measure(Scored(nn.Linear(5, 7, bias=False)), images) == 2 * (2 * 3 * 5 * 7)
    two = Scored(nn.Linear(5, 7), nn.Linear(7, 2))
    assert measure(two, images) == 2 * (2 * 3 * 5 * 7) + 3 * (2 * 3 * 7 * 2)
    two.layers[0].requires_grad_(False)  # a frozen backbone costs no backward
    assert measure(two, images) == 2 * 3 * 5 * 7 + 2 * (2 * 3 * 7 * 2)


def test_measuring_freezes_what_takes_no_part_and_leaves_no_gradient():
    subject = Scored(nn.Linear(5, 7), nn.BatchNorm1d(7))
    subject.layers[0].bias.requires_grad_(False)
    before = copy.deepcopy(subject.state_dict())
    for training in (True, False):
        subject.train(training)
        measure(subject, {"pixel_values": torch.randn(3, 5)})
        assert subject.training is subject.layers[2].training is training
        trained = {name for name, p in subject.named_parameters() if p.requires_grad}
        assert trained == {"layers.0.weight", "layers.1.weight", "layers.1.bias"}
        assert all(p.grad is None for p in subject.parameters())
        assert all(torch.equal(value, before[name]) for name, value in subject.state_dict().items())


def test_images_of_a_size_that_a_model_cannot_take_are_refused_with_the_shape():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, **sizes)
    subject = transformers.ViTForImageClassification(config)
    measure(subject, {"pixel_values": torch.zeros(1, 3, 32, 32)})
    said = r"^ViTForImageClassification cannot take pixel_values \(1, 3, 40, 40\): [^\n]*$"
    with pytest.raises(ConfigError, match=said):
        measure(subject, {"pixel_values": torch.zeros(1, 3, 40, 40)})


# What a user typed ---------------------------------------------------------------------------------------------------


def test_override_sets_numbers_text_switches_and_lists_and_refuses_what_the_config_does_not_have():
    config = transformers.LlamaConfig()
    override(config, "hidden_size=256,num_hidden_layers=4,hidden_act=gelu,attention_bias=true,rms_norm_eps=1e-4")
    override(config, 'rope_parameters={"rope_type":"default","rope_theta":5e5},head_dim=8')
    assert (config.hidden_size, config.num_hidden_layers, config.hidden_act, config.head_dim) == (256, 4, "gelu", 8)
    assert config.attention_bias is True and config.rms_norm_eps == 1e-4
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    images = transformers.ResNetConfig()
    override(images, "depths=[2,2,2,2],layer_type=basic,hidden_sizes=[8, 16, 32, 64]")
    assert (images.depths, images.layer_type, images.hidden_sizes) == ([2, 2, 2, 2], "basic", [8, 16, 32, 64])
    for change in ("hiden_size=256", "hidden_size"):
        said = f"--config_overrides {change}: expected key=value with a key of .*hidden_size"
        with pytest.raises(ConfigError, match=said):
            override(transformers.LlamaConfig(), change)


def test_what_does_not_fit_the_model_is_refused_with_both_numbers():
    subject = llama(max_position_embeddings=16)
    require_fit(subject, words(VOCAB), 16)
    with pytest.raises(ConfigError, match="--seq_length 17 is longer than the model's context of 16 tokens"):
        require_fit(subject, words(VOCAB), 17)
    with pytest.raises(ConfigError, match=f"the tokenizer has {VOCAB + 1} tokens, the model only {VOCAB} embeddings"):
        require_fit(llama(), words(VOCAB + 1), 8)
    with pytest.raises(ConfigError, match="has blocks that only images reach: text cannot train them"):
        require_fit(SimpleNamespace(config=transformers.MllamaConfig()), words(VOCAB), 8)


def test_a_folder_that_is_not_there_is_said_so_and_an_adapter_is_not_taken_for_a_model(tmp_path):
    """Its base would be loaded with it, and it be left aside when new adapters are added."""
    for auto_class, name in ((transformers.AutoConfig, "/no/such"), (transformers.AutoTokenizer, "no such")):
        with pytest.raises(ConfigError, match=f"{name}: no such folder"):
            from_hub(auto_class, name)
    get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    whole = {"use_safetensors": True}
    for auto_class, options in ((transformers.AutoModelForCausalLM, whole), (transformers.AutoConfig, {})):
        with pytest.raises(ConfigError, match=f"{tmp_path}/adapter: an adapter, not a model"):
            from_hub(auto_class, tmp_path / "adapter", **options)

    class OnTheHub:
        @staticmethod
        def from_pretrained(*_: object, **__: object):
            loaded = llama()
            loaded._hf_peft_config_loaded = True
            return loaded, {}

    with pytest.raises(ConfigError, match="somebody/adapter: an adapter, not a model"):
        from_hub(OnTheHub, "somebody/adapter", **whole)


def test_a_card_names_base_results_and_settings():
    settings = {"seed": 3, "run_name": None, "packing": False, "train_file": ["é: “hf_" + "a" * 34]}
    about = {"made_by": "version 0.1.0+abc, DDP x 8 on cuda, bf16", "load": 'load("final")', "library_name": "peft"}
    text = model_card("T", "D", {"eval_loss": 1.25}, settings, **about, base_model="org/base")
    assert text.startswith("---\nlibrary_name: peft\nbase_model: org/base\n---\n\n# T\n")
    assert "| eval_loss | 1.2500 |" in text and "\nMade by version 0.1.0+abc, DDP x 8 on cuda, bf16\n" in text
    assert '```python\nload("final")\n```' in text
    assert "é" in text
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings == {"seed": 3, "packing": False, "train_file": ["é: “***"]}


# Continuations -------------------------------------------------------------------------------------------------------


class Spells:
    """A tokenizer whose text is its ids."""

    eos_token_id = 7

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == self.eos_token_id))


@torch.no_grad()
def greedy(subject, ids, count):
    """Token by token, without a cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(subject(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_continuation_stops_at_the_end_of_text_or_at_its_length(name):
    """It is greedy, whatever the model's own settings say, and sees its prompt's last tokens if not all of it fits."""
    subject, prompts = make(name).train(), [[5, 9, 3], [4], [int(i) for i in tokens(59 if name == "gpt2" else 70)]]
    sampling = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 9.0, "min_new_tokens": 9}
    subject.generation_config = transformers.GenerationConfig(**sampling)
    expected = [greedy(subject.eval(), ids, 6) for ids in prompts]
    if name == "gpt2":
        long = [int(i) for i in tokens(70)]
        assert generate(subject, [long], max_new_tokens=6, ends=())[0] == greedy(subject, long[-64:], 1)
    subject.train()

    def spelled(new, ends):
        last = next((i for i, token in enumerate(new) if token in ends), len(new))
        return " ".join(map(str, [token for token in new[: last + 1] if token != Spells.eos_token_id]))

    for end in (None, expected[0][2]):
        texts = continuations(subject, Spells(), prompts, max_new_tokens=6, end=end)
        assert texts == [spelled(new, (end, Spells.eos_token_id)) for new in expected]
    assert subject.training and subject.generation_config.temperature == 3.0
    assert subject._compiled_call_impl is None


def test_continuations_are_deterministic_and_sampling_follows_its_seed():
    subject = make("llama")
    prompts = [[1, 2, 3], [4]]

    def run(**options):
        return continuations(subject, Spells(), copy.deepcopy(prompts), max_new_tokens=8, **options)

    before = torch.get_rng_state()
    assert run() == run()
    assert run(sample=True, seed=1) == run(sample=True, seed=1)
    assert run(sample=True, seed=1) != run(sample=True, seed=2)
    assert run(sample=True, seed=1) != run()
    assert torch.equal(torch.get_rng_state(), before)


TINY_BART = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": VOCAB}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": VOCAB}


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (transformers.BertConfig(**TINY), False),
        (transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=VOCAB), False),
        (transformers.GPTNeoXConfig(**TINY), True),
        (transformers.BartConfig(**TINY_BART), True),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_see_what_they_are_to_predict_are_refused(config, causal):
    subject = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(8)[None] % VOCAB
    other = torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], dim=1)
    with torch.no_grad():
        first, second = (subject(input_ids=t, use_cache=False).logits[:, :-1] for t in (tokens, other))
    assert torch.equal(first, second) == causal
    with nullcontext() if causal else pytest.raises(ConfigError, match="sees the tokens that it is to predict"):
        require_fit(subject, words(VOCAB), 8)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_proj"])
def test_adapters_are_not_added_to_what_input_and_output_share(tied, target):
    adapted = get_peft_model(llama(tie_word_embeddings=tied), LoraConfig(task_type="CAUSAL_LM", target_modules=[target]))
    refusal = pytest.raises(ConfigError, match=f"--merge_adapter adds the adapter of {target} to a matrix")
    with refusal if tied and target != "q_proj" else nullcontext():
        refuse_tied_embeddings(adapted)


def test_frozen_weights_are_told_apart(tmp_path):
    subject = llama()
    assert identity_of_frozen("anything", subject) == ""
    subject.lm_head.requires_grad_(False)
    found = []
    for changed in (False, True, False):
        with torch.no_grad():
            subject.lm_head.weight[0, 0] = float(changed)
        subject.save_pretrained(tmp_path)
        found.append(identity_of_frozen(str(tmp_path), subject))
    assert found[0] == found[2] != found[1]
    assert identity_of_frozen("on/the-hub", subject) == "None"  # made here


def test_generation_ends_where_a_learned_turn_does():
    """In training and after it: where the model's settings say, at the tokenizer's end (7), and where turns end (5)."""
    subject = llama()
    for before, after in ((None, [7, 5]), (5, [5, 7]), (3, [3, 7, 5]), ([3, 7], [3, 7, 5]), ([3, 5, 7], [3, 5, 7])):
        subject.generation_config.eos_token_id = before
        assert ends_of(subject, Spells(), 5) == after
        for end in (5, None):
            end_generation_at(subject, Spells(), end)
            assert subject.generation_config.eos_token_id == after

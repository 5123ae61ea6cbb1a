"""Containers and clusters give nothing away, and take nothing along."""

import yaml

from tests.conftest import ROOT


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / f"jobs/{name}.yaml").read_text()))


def test_pods_have_no_token_and_talk_only_to_pods_of_their_job():
    """Row 19."""
    for name in ("kubernetes", "kubernetes_multi_node"):
        (job,) = (d for d in documents(name) if d["kind"] == "Job")
        assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    (policy,) = (d for d in documents("kubernetes_multi_node") if d["kind"] == "NetworkPolicy")
    pods = {"matchLabels": {"job-name": job["metadata"]["name"]}}
    rules = policy["spec"]
    assert rules["podSelector"] == pods and rules["policyTypes"] == ["Ingress", "Egress"]
    assert rules["ingress"] == [{"from": [{"podSelector": pods}]}]
    own, names = rules["egress"]
    assert own == {"to": [{"podSelector": pods}]} and {port["port"] for port in names["ports"]} == {53}

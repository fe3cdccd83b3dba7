"""torch.distributed.checkpoint with a key per replica: exact in mid-round, where one key for all is a mix."""

import warnings

import pytest
import saved_run
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hdet


def save(path, parts, key):
    model, optimizer = get_state_dict(parts["model"], parts["optimizer"])
    dcp.save({key: {"model": model, "optimizer": optimizer}}, checkpoint_id=f"{path}/sharded")
    hdet.save(path, {"scheduler": parts["scheduler"], "ensemble": parts["ensemble"], "sharded": "sharded"})


def resume(path, key=None):
    parts = saved_run.parts()
    loaded = hdet.load(path, {"scheduler": parts["scheduler"], "ensemble": parts["ensemble"]})
    with parts["ensemble"].saving():
        model, optimizer = get_state_dict(parts["model"], parts["optimizer"])
    state = {"model": model, "optimizer": optimizer}
    dcp.load(
        {key or hdet.checkpoint.replica_key(parts["ensemble"]): state},
        checkpoint_id=f"{path}/{loaded.values['sharded']}",
    )
    set_state_dict(
        parts["model"], parts["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return parts


def save_and_resume(path, stop, key):
    warnings.simplefilter("ignore")
    whole = saved_run.parts()
    saved_run.train(whole, range(stop))
    used = key or hdet.checkpoint.replica_key(whole["ensemble"])
    save(path, whole, used)
    saved_run.train(whole, range(stop, 14))
    expected = saved_run.bits(whole)
    again = resume(path, key)
    saved_run.train(again, range(stop, 14))
    return used, saved_run.bits(again) == expected


@pytest.mark.parametrize("stop", [6, 8])
def test_a_key_per_replica_is_exact(tmp_path, stop):
    expected = ["replica-0-of-2", "replica-1-of-2"] if stop == 6 else ["consensus"] * 2
    assert run(save_and_resume, 2, str(tmp_path), stop, None) == [(key, True) for key in expected]


def test_one_key_in_mid_round_is_a_mix(tmp_path):
    assert not all(same for _, same in run(save_and_resume, 2, str(tmp_path), 6, "model"))


def refuses(path):
    warnings.simplefilter("ignore")
    parts = saved_run.parts()
    parts["model"].module[0].weight = torch.nn.Parameter(
        torch.distributed.tensor.distribute_tensor(
            torch.ones(8, 6), torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        )
    )
    with pytest.raises(ValueError, match=r"model\['0.weight'\] must be .*torch.distributed.checkpoint"):
        hdet.save(path, parts)


def test_sharded_tensors_are_sent_there(tmp_path):
    run(refuses, 2, str(tmp_path))

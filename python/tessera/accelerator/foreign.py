"""The Accelerator's members that belong to other engines: each says so."""

from __future__ import annotations

from typing import Any

from tessera.compat.refusals import LAYOUT, not_ours


class Foreign:
    deepspeed_plugin = property(lambda self: self.state.deepspeed_plugin)
    is_fsdp2 = property(lambda self: False)
    is_composable_parallelism_enabled = property(lambda self: False)
    parallelism_config = property(lambda self: None)
    multi_gpu = property(lambda self: self.use_distributed)
    has_lomo_optimizer = False
    use_fp16 = property(lambda self: self.mixed_precision == "fp16")

    @property
    def torch_device_mesh(self) -> Any:
        raise not_ours("torch_device_mesh", "PyTorch's device meshes", "see state.mesh for the ranks of this process")

    @property
    def fp8_backend(self) -> Any:
        return None

    def maybe_context_parallel(self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None) -> Any:
        raise not_ours("maybe_context_parallel", "PyTorch's context parallelism", "give context_parallel_size in a MegatronLMPlugin")

    def lomo_backward(self, loss: Any, learning_rate: float) -> None:
        raise not_ours("lomo_backward", "LOMO optimizers", "use torch.optim.AdamW")

    def verify_device_map(self, model: Any) -> bool:
        """False: models are not dispatched by a device map here."""
        return False

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        raise not_ours("deepspeed_ulysses_dl_adapter", "DeepSpeed", LAYOUT)

"""The golden values are what PyTorch computes, and transformers agrees with them."""
import glob
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ORACLE, GOLDEN = os.path.join(HERE, "oracle"), os.path.join(HERE, "golden")
VENV_PYTHON = os.path.join(HERE, "..", "build", "venv", "bin", "python")


def importable(name):
    return importlib.util.find_spec(name) is not None


def read_safetensors(path):
    import numpy as np
    kinds = {"F32": "<f4", "F64": "<f8", "I32": "<i4"}
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        body = f.read()
    metadata = header.pop("__metadata__")
    return metadata, {name: np.frombuffer(body[slice(*t["data_offsets"])], kinds[t["dtype"]]).reshape(t["shape"])
                      for name, t in header.items()}


@unittest.skipUnless(importable("torch") and importable("numpy"), "PyTorch is not installed (scripts/install_deps.sh --test)")
class Oracle(unittest.TestCase):
    def test_golden_values_regenerate(self):
        import numpy as np
        with tempfile.TemporaryDirectory() as again:
            subprocess.run([sys.executable, os.path.join(ORACLE, "make_model.py"), again], check=True)
            names = sorted(os.path.basename(path) for path in glob.glob(again + "/*.safetensors"))
            self.assertEqual(len(names), 4)
            for name in names:
                (old_meta, old), (new_meta, new) = (read_safetensors(os.path.join(d, name)) for d in (GOLDEN, again))
                self.assertEqual(old_meta, new_meta)
                self.assertEqual(list(old), list(new))
                for tensor in old:
                    np.testing.assert_allclose(new[tensor], old[tensor], rtol=0, atol=1e-6, err_msg=name + " " + tensor)

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "build/venv with transformers is not there (scripts/install_deps.sh --test)")
    def test_transformers_computes_the_golden_logits(self):
        import numpy as np
        sys.path.insert(0, ORACLE)
        from make_model import write_safetensors
        for name in ("model_a", "model_b", "model_c"):
            metadata, tensors = read_safetensors(os.path.join(GOLDEN, name + ".safetensors"))
            with self.subTest(name), tempfile.TemporaryDirectory() as model:
                with open(model + "/config.json", "w") as f:
                    f.write(metadata["config"])
                weights = {key[len("weight."):]: array for key, array in tensors.items() if key.startswith("weight.")}
                write_safetensors(model + "/model.safetensors", weights, {"format": "pt"})
                np.savetxt(model + "/ids", tensors["ids"], "%d")
                subprocess.run([VENV_PYTHON, os.path.join(ORACLE, "check_hf.py"), model, model + "/ids", model + "/out"],
                               check=True, stderr=subprocess.DEVNULL)
                logits = np.fromfile(model + "/out", "<f4").reshape(tensors["logits"].shape)
                np.testing.assert_allclose(logits, tensors["logits"], rtol=0, atol=2e-6)


if __name__ == "__main__":
    unittest.main()

"""Where the memory of a training step goes, measured or predicted, and what fits.

An out-of-memory error names the allocation that failed, never what filled the device before it; and the usual remedy,
halving the batch until it runs, finds out nothing. A step's peak is a sum: parameters, gradients and the optimizer's
state don't depend on the batch, activations grow with it. The rule: *count each tensor's storage once, from the
operator that made it to its last reference, and ask at the peak what each is for.* The same count runs on real tensors
(a measurement) and on fake ones, which have shapes and no data (a prediction, without a GPU):

    prediction = predict_peak(make_model, make_batch, make_optimizer, batch_size=64)
    print(prediction)                                   # by category, by phase
    prediction.fits(24 * 2**30)
    print(measure_peak(lambda: train_step(batch), model=model, optimizer=optimizer))

On a CPU both count what operators return, and agree to the byte or nearly so. By the CPU allocator's own events that is
all there is for linear layers and attention; inside of convolutions oneDNN takes more (0 to 20 % of the peaks of three
small models, torch 2.13, x86-64), which no ledger of operators sees. For CUDA a prediction counts the same operators in
the allocator's blocks. One step was compared on a GPU (``data/gpu/memory.json``: a convolutional net and AdamW, H100,
torch 2.11+cu130): 1.97 GB were predicted, and the allocator's peak was 2.09 GB, 6 % more: kernels take workspaces.

Sources: ``c10/cuda/CUDACachingAllocator.cpp``; pytorch's "Understanding CUDA memory usage";
``torch.distributed._tools.mem_tracker``, which counts the same bytes at the peak, and keeps no moment before it.
"""

from course_lib.memory.batch_size import find_batch_size, find_batch_sizes
from course_lib.memory.measuring import measure_peak
from course_lib.memory.predicting import predict_peak
from course_lib.memory.reporting import peak_report
from course_lib.memory.saved import saved_bytes

__all__ = ["find_batch_size", "find_batch_sizes", "measure_peak", "peak_report", "predict_peak", "saved_bytes"]

// Stands for CUDA's header of this name; all is in emulation.h, which every translation unit includes first.

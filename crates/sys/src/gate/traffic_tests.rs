//! The gate before cgroups with traffic, which is counted where it arrives.

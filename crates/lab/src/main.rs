//! `tidegate-lab`: see [`tidegate_lab`] for what it is.

fn main() -> std::process::ExitCode {
    tidegate_lab::cli::main()
}

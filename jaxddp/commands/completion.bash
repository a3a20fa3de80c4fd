# Completion of jaxddp in bash, written by `jaxddp completion bash`.

<CANDIDATES>

_jaxddp() {
  local begin="${COMP_WORDS[COMP_CWORD]}" line="" kind=""
  # bash takes = as a word of its own.
  [ "$begin" = "=" ] && begin=""
  COMPREPLY=()
  while IFS= read -r line; do
    case "$line" in
      @files) kind=f ;;
      @folders) kind=d ;;
      @runs)
        for line in "$begin"*/config.json runs/*/config.json; do
          line="${line%/config.json}"
          case "$line" in "$begin"*) [ -f "$line/config.json" ] && COMPREPLY+=("$line") ;; esac
        done ;;
      "$begin"*) COMPREPLY+=("$line") ;;
    esac
  done < <(_jaxddp_candidates "$begin" "${COMP_WORDS[@]:1:COMP_CWORD-1}")
  if [ -n "$kind" ]; then
    compopt -o filenames 2>/dev/null
    while IFS= read -r line; do
      COMPREPLY+=("$line")
    done < <(compgen "-$kind" -- "$begin")
  fi
}

complete -F _jaxddp jaxddp

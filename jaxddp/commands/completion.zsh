#compdef jaxddp
# Completion of jaxddp in zsh, written by `jaxddp completion zsh`.

<CANDIDATES>

_jaxddp() {
  setopt local_options null_glob
  local begin="${words[CURRENT]}" line="" kind=""
  local -a before=("${(@)words[2,CURRENT-1]}") found=()
  if [[ "$begin" == --*=* ]]; then
    before+=("${begin%%=*}")
    begin="${begin#*=}"
    compset -P '*='
  fi
  while IFS= read -r line; do
    case "$line" in
      @files) kind=f ;;
      @folders) kind=d ;;
      @runs) for line in *(/N) runs/*(/N); do [[ -f "$line/config.json" ]] && found+=("$line"); done ;;
      *) found+=("$line") ;;
    esac
  done < <(_jaxddp_candidates "$begin" "${before[@]}")
  (( ${#found} )) && compadd -a found
  [[ "$kind" == f ]] && _files
  [[ "$kind" == d ]] && _files -/
  return 0
}

# The file is either a function that zsh loads for the first completion, or it is sourced.
if [[ "${funcstack[1]}" == _jaxddp ]]; then _jaxddp "$@"; else compdef _jaxddp jaxddp; fi
